"""Which layer costs what: attribution of the loss, and what to do about it."""
