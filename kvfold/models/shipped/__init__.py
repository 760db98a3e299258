"""The modelling code that travels next to the weights of remote outputs; it imports nothing of kvfold."""
