"""The suites of `kvfold eval`, a file each, and the table that names them."""
