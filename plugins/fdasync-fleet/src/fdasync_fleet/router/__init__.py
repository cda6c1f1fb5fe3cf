"""Sends requests to instances by their load and their prefixes, tries again where that is safe, gathers results."""
