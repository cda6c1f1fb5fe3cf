"""Any store in a process of its own: the engine's side, the process, the messages between them."""
