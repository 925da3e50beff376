// Package e2e holds the end-to-end tests: real daemons, real kids, a practice internet, and the invariants of
// docs/threat-model.md one by one.
package e2e

import (
	"os"
	"testing"
	"time"

	"tagout/internal/testenv"
)

// secret is the vault entry that cards of this package ask for.
const secret = "vendor_api"

// card allows the practice internet's names, each with one protocol.
const card = `apiVersion: tagout/v1
kind: Card
name: e2e
task: Whatever an end-to-end test makes of it.
image: host
egress:
  allow:
    - host: api.vendor.test
      ports: [443]
      protocol: tls
      inspect: true
      credential: vendor_api
    - host: files.vendor.test
      ports: [80]
      protocol: http
    - host: ticks.vendor.test
      ports: [7000]
      protocol: tcp
filesystem:
  inputs:
    - {from: hostile, to: /workspace/hostile, mode: "0755"}
  workspace: 64MiB
  tmp: 8MiB
identity:
  scope:
    - {secret: vendor_api, env: VENDOR_API_KEY}
limits: {pids: 128, memory: 256MiB, cpus: 1, openFiles: 1024}
stop: {authority: "Ada Operator", maxTime: 60s}
`

// bareCard allows nothing and holds nothing.
const bareCard = `apiVersion: tagout/v1
kind: Card
name: bare
task: Nothing at all.
image: host
stop: {authority: "Ada Operator", maxTime: 60s}
`

// start returns a running box whose vault holds the secret.
func start(t *testing.T) *testenv.Box {
	t.Helper()
	box := testenv.Start(t)
	box.SetSecret(secret, box.Net.Secret(), "api.vendor.test:443")
	return box
}

// hostile returns the inputs of card.
func hostile(t *testing.T, box *testenv.Box) map[string][]byte {
	t.Helper()
	raw, err := os.ReadFile(box.Bin + "/hostile")
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]byte{"hostile": raw}
}

// soon bounds what should happen at once, generously: these tests judge order and outcome, never speed.
const soon = 20 * time.Second
