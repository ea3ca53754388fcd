"""Who may use the server, from which web pages, and how much a connection may hold."""
