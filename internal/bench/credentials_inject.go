package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	"tagout/internal/wire"
)

// mostInjection is how much longer an inspected request may take for the secret that is put into it, in microseconds.
const mostInjection = 200

// injectionCard lets the kid ask the vendor's API, which knows the secret.
const injectionCard = `apiVersion: tagout/v1
kind: Card
name: bench-injection
task: Ask the same thing with a secret and without one.
image: host
egress:
  allow:
    - {host: api.vendor.test, ports: [443], protocol: tls, inspect: true, credential: vendor_api}
filesystem:
  inputs:
    - {from: hostile, to: /workspace/hostile, mode: "0755"}
  workspace: 64MiB
identity:
  scope:
    - {secret: vendor_api, env: VENDOR_API_KEY}
limits: {pids: 64, memory: 256MiB, cpus: 2, openFiles: 256}
stop: {authority: "Ada Operator", maxTime: 60s}
`

// injection measures how much longer an inspected request takes for the secret that the proxy fetches from credd and puts
// into it, and for the looking through of the answer: the same requests of one kid, with a token and without one, in turns.
func (r *credentials) injection(ctx context.Context) ([]Metric, error) {
	fmt.Fprintf(r.Out, "asking for the same %d times with a secret and without one\n", r.Requests)
	kid, err := r.box.Spawn(ctx, wire.SpawnRequest{Name: "injection", Purpose: "measure what a secret costs a request", Card: injectionCard, InputDir: r.InputDir})
	if err != nil {
		return nil, err
	}
	var out, said bytes.Buffer
	exit := -1
	argv := []string{"/workspace/hostile", "pairs", "https://" + benchHost + "/v1/hello", strconv.Itoa(r.Requests)}
	err = r.box.Exec(ctx, kid.Name, wire.ExecRequest{Argv: argv}, func(f wire.ExecFrame) {
		out.Write(f.Stdout)
		said.Write(f.Stderr)
		if f.Exit != nil && f.Exit.Result == "exited" {
			exit = f.Exit.Code
		}
	})
	if err == nil && exit != 0 {
		err = fmt.Errorf("the client ended with %d: %s", exit, said.String())
	}
	if err != nil {
		return nil, err
	}
	var got struct {
		Plain     float64 `json:"plain_us"`
		Secret    float64 `json:"secret_us"`
		PlainP99  float64 `json:"plain_p99_us"`
		SecretP99 float64 `json:"secret_p99_us"`
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		return nil, fmt.Errorf("reading what the client printed: %w", err)
	}
	added := AtMost("a secret in an inspected request adds, p50", got.Secret-got.Plain, "µs", mostInjection)
	if !added.Met {
		added.Limits = "the call of credd, where other programs use the processors"
	}
	return []Metric{
		added,
		AtMost("inspected request with a secret, p50", got.Secret, "µs", 0).Beside("without one", got.Plain),
		AtMost("inspected request with a secret, p99", got.SecretP99, "µs", 0).Beside("without one", got.PlainP99),
	}, r.box.Destroy(ctx, kid.Name, "measured")
}
