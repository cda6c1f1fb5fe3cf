"""The conformance suite for transports, with senders in processes of their own that die, stop or overwrite."""
