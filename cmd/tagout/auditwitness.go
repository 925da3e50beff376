package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/mod/sumdb/note"

	"tagout/internal/audit/witness"
)

func (a *app) auditWitnessCommand() *cobra.Command {
	var listen, dir, name, cert, key string
	var logs []string
	cmd := &cobra.Command{
		Use: "witness", Short: "Keep and sign other machines' checkpoints, on a machine that their root does not reach",
		Long: `Serve as a witness (c2sp.org/tlog-witness): take checkpoints of the logs whose public keys --log names, sign those that
show that the log only grew, and refuse all others. DIR holds the witness's key and, in the file checkpoints, all that it
signed: ` + "`tagout audit verify --witness`" + ` reads it. What the box is to be configured with is printed:

  audit: {witnesses: [{name: NAME, url: http://…, key: KEY}]}`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if (cert == "") != (key == "") {
				return usage(errors.New("give both --tls-cert and --tls-key, or neither"))
			}
			var known []note.Verifier
			for _, path := range logs {
				k, err := readLogKey(path)
				if err != nil {
					return usage(err)
				}
				known = append(known, k)
			}
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return fmt.Errorf("making the witness's directory: %w", err)
			}
			signs, err := witness.OpenKey(filepath.Join(dir, "key"), name)
			if err != nil {
				return err
			}
			return a.serveWitness(cmd.Context(), listen, cert, key, witness.New(dir, signs, known...), signs.Public())
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:8480", "address and port")
	cmd.Flags().StringVar(&dir, "dir", "", "directory of the witness's own")
	cmd.Flags().StringVar(&name, "name", "tagout-witness", "name of the witness, where it has no key yet")
	cmd.Flags().StringSliceVar(&logs, "log", nil, "a file with a log's public key (`tagout audit keys`); may be given again")
	cmd.Flags().StringVar(&cert, "tls-cert", "", "PEM file with the certificate; without, it serves plain HTTP")
	cmd.Flags().StringVar(&key, "tls-key", "", "PEM file with the certificate's key")
	cmd.MarkFlagRequired("dir") // the flags are there
	cmd.MarkFlagRequired("log")
	return cmd
}

// serveWitness serves until ctx ends.
func (a *app) serveWitness(ctx context.Context, listen, cert, key string, h http.Handler, public string) error {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", listen)
	if err != nil {
		return fmt.Errorf("serving as a witness: %w", err)
	}
	a.printf("serving on %s with the key %s\n", l.Addr(), public)
	srv := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second}
	go func() {
		<-ctx.Done()
		srv.Close() // a checkpoint that was being added is sent again
	}()
	if cert != "" {
		err = srv.ServeTLS(l, cert, key)
	} else {
		err = srv.Serve(l)
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
