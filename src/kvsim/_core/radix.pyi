# The tree has no name that Python can call: `radix_pass` and `state` are its users.
