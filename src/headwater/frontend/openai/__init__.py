"""The OpenAI API: request structs, validation, routes, streamed answers."""
