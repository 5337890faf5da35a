"""A small HTTP/1.1 server on httptools behind a port (`base`): requests in; write, finish and disconnect out."""
