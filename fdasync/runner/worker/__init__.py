"""Any runner in a process of its own."""
