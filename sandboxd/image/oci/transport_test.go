package oci

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
)

// TestAddressesThatAreNotCalled: nothing leads to an address that no rule may grant, and to a private one only for who may
// call it.
func TestAddressesThatAreNotCalled(t *testing.T) {
	var calls atomic.Int64
	shop := registry.New()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls.Add(1)
		shop.ServeHTTP(w, r)
	}))
	defer srv.Close()
	pull := func(private bool, ref string) error {
		transport, err := NewTransport(netip.MustParseAddrPort("127.0.0.1:1"), nil, private)
		if err != nil {
			t.Fatal(err)
		}
		defer transport.CloseIdleConnections()
		_, _, _, err = addFrom(t, Pulled{Ref: ref, Transport: transport})
		return err
	}
	ref := strings.TrimPrefix(srv.URL, "http://") + "/x:1"
	if err := pull(false, ref); !errors.Is(err, ErrAddress) || calls.Load() != 0 {
		t.Errorf("loopback: %v after %d calls", err, calls.Load())
	}
	if err := pull(true, ref); err == nil || errors.Is(err, ErrAddress) || calls.Load() == 0 { // control: it has no such image
		t.Errorf("loopback, for root: %v after %d calls", err, calls.Load())
	}
	transport, err := NewTransport(netip.MustParseAddrPort("127.0.0.1:1"), nil, true)
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"http://169.254.169.254/latest", "http://[fd00:ec2::254]/", "http://[::ffff:169.254.169.254]/", "https://100.100.100.200/"} {
		if _, err := transport.RoundTrip(httptest.NewRequest(http.MethodGet, bad, nil)); !errors.Is(err, ErrAddress) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	resp, err := transport.RoundTrip(httptest.NewRequest(http.MethodGet, srv.URL, nil))
	if err != nil { // control
		t.Fatalf("a registry on loopback, for root: %v", err)
	}
	resp.Body.Close() // nothing in it is asked for
	transport.CloseIdleConnections()
}
