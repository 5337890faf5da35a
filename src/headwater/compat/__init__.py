"""Call signatures and command lines of other systems, on top of ours."""
