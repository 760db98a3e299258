"""The processes of a run: their accelerator, sharded models, layers loaded one by one, and profiles."""
