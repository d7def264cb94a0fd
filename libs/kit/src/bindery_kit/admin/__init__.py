"""HTTP for operators, on bare ASGI: requests, routes, tokens, and the application that puts them together."""
