"""`kvfold lab`: attention variants compared by cost, and each as a plain torch module."""
