"""The decisions of a conversion.

From a request to a plan, with its form, serving shape, engines and notices.
"""
