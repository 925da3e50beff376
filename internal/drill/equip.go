package drill

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"tagout/internal/card"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// Equip puts the practice vendor's secret into the vault of the running instance, under the name that the
// card's identity section asks for first and bound to the vendor's API alone. It returns that name.
func Equip(ctx context.Context, inst instance.Instance, net *practice.Internet, cardFile string, cardYAML []byte) (string, error) {
	parsed, err := card.Parse(cardFile, cardYAML)
	if err != nil {
		return "", err
	}
	if len(parsed.Identity.Scope) == 0 {
		return "", errors.New(cardFile + " asks for no secret: give its identity section a scope")
	}
	name := parsed.Identity.Scope[0].Name
	credd := control.NewClient(inst.Socket(instance.Credd))
	defer credd.CloseIdle()
	entry := wire.VaultEntry{Value: net.Secret(), Hosts: []string{practice.NameAPI + ":443"}}
	if err := credd.Call(ctx, http.MethodPut, "/v1/vault/"+name, entry, nil); err != nil {
		return "", fmt.Errorf("putting %s into the vault: %w", name, err)
	}
	return name, nil
}
