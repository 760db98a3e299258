"""`kvfold verify`: is an output what it claims, by rules, and by running it apart from kvfold."""
