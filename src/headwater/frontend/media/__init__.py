"""What keeps media of requests from being used against the network the server stands in."""
