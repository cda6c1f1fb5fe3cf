"""Any store in a process of its own."""
