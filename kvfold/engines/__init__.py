"""The engines that run outputs.

`rules/` says what each engine does with an output, and how that is known. `probes/` holds scripts that run
one in an engine without kvfold. The files here are `kvfold verify`, which uses both, and `kvfold engines`.
"""
