# The host tier has no name that Python can call: the pass, `state` and `drive` are its users.
