"""The world, on trio: processes, sockets and files."""
