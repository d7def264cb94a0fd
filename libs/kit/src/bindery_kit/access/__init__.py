"""Access: who called an HTTP port, what the caller may do, and the record of what was changed and refused."""
