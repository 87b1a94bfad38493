# The pass has no name that Python can call: `state` and `drive` are its users.
