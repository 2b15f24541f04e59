"""Scripts that measure jaxrl on the machine they run on."""
