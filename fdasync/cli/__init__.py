"""The `fdasync` command: options, exit codes and words for people. It starts engines, instances and demos."""
