package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"time"
)

// pairsWarmup is how many pairs are asked for before the clock runs: connections are opened by then.
const pairsWarmup = 50

// pairs is what the token costs a request. Microseconds, medians but for P99.
type pairsResult struct {
	Count     int     `json:"count"`
	Plain     float64 `json:"plain_us"`
	Secret    float64 `json:"secret_us"`
	PlainP99  float64 `json:"plain_p99_us"`
	SecretP99 float64 `json:"secret_p99_us"`
}

// pairs asks for a URL n times without the token and n times with it, in turns and on connections that stay open, and
// prints how long both take.
func pairs(ctx context.Context, w io.Writer, args []string) error {
	if len(args) != 2 {
		usage("pairs wants a URL and a number")
	}
	n, err := strconv.Atoi(args[1])
	if err != nil || n < 1 {
		usage("pairs wants a number of at least 1")
	}
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetHTTP1(true)
	client := &http.Client{Transport: tr, Timeout: 2 * tryWithin}
	var took [2][]time.Duration
	for i := range n + pairsWarmup {
		for kind, fields := range [2]http.Header{{}, {"Authorization": {"Bearer " + os.Getenv(tokenEnv)}}} {
			d, err := askOnce(ctx, client, args[0], fields)
			if err != nil {
				return err
			}
			if i >= pairsWarmup {
				took[kind] = append(took[kind], d)
			}
		}
	}
	slices.Sort(took[0])
	slices.Sort(took[1])
	at := func(kind, percent int) float64 { return float64(took[kind][n*percent/100].Nanoseconds()) / 1e3 }
	return json.NewEncoder(w).Encode(pairsResult{Count: n, Plain: at(0, 50), Secret: at(1, 50), PlainP99: at(0, 99), SecretP99: at(1, 99)})
}

func askOnce(ctx context.Context, client *http.Client, url string, fields http.Header) (time.Duration, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return 0, fmt.Errorf("asking %s: %w", url, err)
	}
	req.Header = fields
	began := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return 0, fmt.Errorf("asking %s: %w", url, err)
	}
	defer resp.Body.Close() // read below
	body, err := io.ReadAll(resp.Body)
	took := time.Since(began)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	if err != nil {
		return 0, fmt.Errorf("asking %s: %w", url, err)
	}
	return took, nil
}
