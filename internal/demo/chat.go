package demo

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"tagout/internal/control"
	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

const (
	chatKid  = "chat"
	modelKey = "llm_key" // the name of the secret, as the card has it
)

// chat puts the model's key into the vault and runs the vendor's client library in a kid that holds a placeholder.
func (s *show) chat(ctx context.Context) error {
	credd := control.NewClient(s.inst.Socket(instance.Credd))
	defer credd.CloseIdle()
	entry := wire.VaultEntry{
		Value: s.net.Model.Key(), Hosts: []string{practice.NameModel + ":443"}, Present: wire.Presentation{As: wire.AsBearer},
		Methods: []string{http.MethodGet, http.MethodPost}, Paths: []string{"/v1/*"},
	}
	if err := credd.Call(ctx, http.MethodPut, "/v1/vault/"+modelKey, entry, nil); err != nil {
		return fmt.Errorf("putting %s into the vault: %w", modelKey, err)
	}
	s.ev.modelKey = []byte(s.net.Model.Key())
	fmt.Fprintf(s.Out, "  secret %s is in the vault, for %s alone, as a bearer token\n", modelKey, practice.NameModel)
	box := drill.Sockets(s.inst, s.net)
	if _, err := box.Spawn(ctx, wire.SpawnRequest{
		Name: chatKid, Purpose: "ask a language model with its vendor's client library", Card: string(s.ev.chatCard), CardFile: "chat.yaml", InputDir: s.inputs,
	}); err != nil {
		return fmt.Errorf("spawning kid %s: %w", chatKid, err)
	}
	lines := &lineBuffer{each: func(line string) { fmt.Fprintf(s.Out, "  | %s\n", line) }}
	var exit *wire.ExecExit
	err := box.Exec(ctx, chatKid, wire.ExecRequest{
		Argv: []string{"/bin/sh", "-c", `echo "OPENAI_API_KEY=$OPENAI_API_KEY"; /workspace/chat "Which key do I use?"`}, Timeout: 30 * time.Second,
	}, func(f wire.ExecFrame) {
		s.ev.chatted = append(append(s.ev.chatted, f.Stdout...), f.Stderr...)
		lines.add(f.Stdout)
		lines.add(f.Stderr)
		if f.Exit != nil {
			exit = f.Exit
		}
	})
	lines.flush()
	s.ev.model = s.net.Model.Tally()
	switch {
	case err != nil:
		return fmt.Errorf("running the client: %w", err)
	case exit == nil:
		return errors.New("running the client: the output ended without saying how it did")
	case exit.Result != "exited" || exit.Code != 0:
		return fmt.Errorf("running the client: it ended with %s %d %s", exit.Result, exit.Code, exit.Detail)
	}
	s.ev.logs = readLogs(s.inst)
	if err := box.Destroy(ctx, chatKid, "the model has answered"); err != nil {
		return fmt.Errorf("destroying kid %s: %w", chatKid, err)
	}
	return nil
}
