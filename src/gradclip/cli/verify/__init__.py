"""`gradclip verify`: the library against every framework that is installed, and those against float64."""
