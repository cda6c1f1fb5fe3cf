"""The transport by Mooncake's transfer engine: blocks of one instance's memory go to another's over a fast network."""
