// It is here so that the functions of fork.go that package runtime provides may have no body.
