# The KVBM tiers have no name that Python can call: the pass, `state` and `drive` are their users.
