"""`kvfold publish`: what goes to a repository, how it gets there, and the card that goes with it."""
