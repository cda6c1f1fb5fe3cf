"""Commands of `fdasync` that start and watch instances: options, exit codes and words for people."""
