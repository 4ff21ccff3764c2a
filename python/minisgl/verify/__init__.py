"""`minisgl verify`: check the numbers of a checkpoint on this machine, in every way in which a step can be computed."""
