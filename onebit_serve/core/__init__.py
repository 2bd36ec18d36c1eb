"""Values in, values out: nothing here knows trio, a socket, a file or the clock."""
