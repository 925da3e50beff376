// Command goproxy is the bare library that the proxy builds on, with no hook, record or rule: a peer for
// benchmarks.
//
//	goproxy LISTEN
package main

import (
	"log"
	"net/http"
	"os"

	"github.com/elazarl/goproxy"
)

func main() {
	srv := &http.Server{Addr: os.Args[1], Handler: goproxy.NewProxyHttpServer()}
	log.Fatal(srv.ListenAndServe())
}
