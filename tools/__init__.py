"""Small programs that `make` calls; nothing that serves a request imports them."""
