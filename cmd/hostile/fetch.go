package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"
)

// fetch asks for a URL with Go's own client and its defaults, and prints status line and body.
func fetch(ctx context.Context, w io.Writer, args []string) error {
	if len(args) != 2 {
		usage("fetch wants METHOD URL")
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, args[0], args[1], http.NoBody)
	if err != nil {
		return fmt.Errorf("fetching %s: %w", args[1], err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("fetching: %w", err)
	}
	defer resp.Body.Close()
	fmt.Fprintf(w, "%s %s\n", resp.Proto, resp.Status)
	if _, err := io.Copy(w, resp.Body); err != nil {
		return fmt.Errorf("fetching %s: %w", args[1], err)
	}
	if resp.StatusCode >= http.StatusBadRequest {
		return fmt.Errorf("fetching %s: %s", args[1], resp.Status)
	}
	return nil
}
