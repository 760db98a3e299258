"""Training of a converted checkpoint against its source.

`kvfold.distill.run.job.distill(recipe)` is the function, `kvfold distill RECIPE` the command. A folder
imports only those before it: recipe, data, losses, parallel, stages, watch, run.
"""
