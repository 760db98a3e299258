"""Loads remote outputs without `trust_remote_code`: importing this module is all that is needed.

    >>> import kvfold.register
    >>> model = AutoModelForCausalLM.from_pretrained("out/fold")

The code of the installed kvfold runs, not the copy next to the weights. An output of a newer kvfold is
refused.
"""

from .models.auto_classes import register_auto_classes

register_auto_classes()
