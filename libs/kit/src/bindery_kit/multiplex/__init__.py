"""Many HTTP requests over one connection between two processes of the same kind: `bindery-requests/1`.

The connection begins as an HTTP/1.1 request with `Upgrade: bindery-requests/1`, which authenticates like every request,
and then carries frames (`frames`, `heads`). Each request inside runs through the same application as a request of its
own connection would, with the same checks. `docs/adr/0028` has the reasons for a protocol of our own.

`streams` has the flow control that both ends share. `peers` chooses and opens connections (`link`) to other processes,
`server` serves those of others (`served`).
"""
