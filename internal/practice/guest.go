package practice

import (
	"fmt"
	"net/http"
)

// Host has this internet serve handler over TLS as name, on a port of the user's own service's address, until it is closed.
// It is called by one goroutine at a time.
func (n *Internet) Host(name string, port uint16, handler http.Handler) error {
	if err := n.serveHTTP(n.OwnAddr(), port, name, handler); err != nil {
		return fmt.Errorf("hosting %s: %w", name, err)
	}
	n.DNS.SetHost(name, n.OwnAddr())
	return nil
}
