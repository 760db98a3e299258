"""Windows of tokens for a run: their order, the tokens on disk, chats and documents."""
