"""The conformance suites for runners, on a bench that writes steps by hand, without a scheduler."""
