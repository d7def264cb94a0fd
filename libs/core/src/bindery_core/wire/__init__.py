"""The BookKeeper wire protocol: bytes in, messages out, and back. No sockets here."""
