"""Train a converted checkpoint against its source: recipes, data, losses, the loop and its exact resume.

`kvfold.distill.run.job.distill(recipe)` is the library entry; `kvfold distill RECIPE` the command.
"""
