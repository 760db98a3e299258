"""Scripts that measure a checkpoint in an engine; they run in a process of their own and import no kvfold."""
