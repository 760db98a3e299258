"""The command `kvfold migrate`: fold, distil and evaluate in steps, as far as a bound holds."""
