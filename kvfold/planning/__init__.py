"""`kvfold plan`: targets that fit, what they take and lose, ranked."""
