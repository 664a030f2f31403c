"""Names of other systems, under which bough can be imported."""
