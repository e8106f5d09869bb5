"""Lists what is known of the five UCI tables: files, columns, target, digest."""

import dataclasses
import datetime
from collections.abc import Callable

import numpy as np

Columns = dict[str, np.ndarray]  # Each column is [N], of float64 or of strings.


@dataclasses.dataclass(frozen=True)
class UciTable:
  """The description of one table: where it is, how to parse it, what it must contain.

  Attributes:
    archive: Path of the archive below UCI's address.
    files: The files to concatenate, each given by the names that it may have.
    columns: Our names of the columns, in the order of the file, whatever its header.
    target: The column to predict.
    digest: SHA-256 of the used columns, as `uci` computes it.
    num_rows: Number of rows without missing values.
    unused: Columns that are neither inputs nor target.
    categorical: Columns of text.
    delimiter: The separator of the cells; None for white space.
    standardised_error: Whether errors are reported in standard deviations of the
      target, see `Dataset`.
    derive: A function from the file's columns to inputs and target; None if they are
      the same.
  """

  archive: str
  files: tuple[tuple[str, ...], ...]
  columns: tuple[str, ...]
  target: str
  digest: str
  num_rows: int
  unused: tuple[str, ...] = ()
  categorical: tuple[str, ...] = ()
  delimiter: str | None = ","
  standardised_error: bool = False
  derive: Callable[[Columns], Columns] | None = None


def clock(columns: Columns) -> Columns:
  """Replaces date and time of the SML table by day of the year and hour of the day."""
  rest = dict(columns)
  hours = [time.split(":") for time in rest.pop("2:Time")]
  days = [date.split("/") for date in rest.pop("1:Date")]
  rest["time_of_day"] = np.array([int(h) + int(m) / 60 for h, m in hours])
  rest["day_of_year"] = np.array(
    [
      float(datetime.date(int(y), int(m), int(d)).timetuple().tm_yday)
      for d, m, y in days
    ]
  )
  return rest


def in_order(columns: Columns) -> Columns:
  """Sorts the rows, because the sheets of the CCPP workbook are shuffles of one."""
  order = np.lexsort(list(columns.values())[::-1])
  return {name: values[order] for name, values in columns.items()}


TABLES = {
  "skillcraft": UciTable(
    archive="272/skillcraft1+master+table+dataset.zip",
    files=(("SkillCraft1_Dataset.csv",),),
    columns=(
      "GameID",
      "LeagueIndex",
      "Age",
      "HoursPerWeek",
      "TotalHours",
      "APM",
      "SelectByHotkeys",
      "AssignToHotkeys",
      "UniqueHotkeys",
      "MinimapAttacks",
      "MinimapRightClicks",
      "NumberOfPACs",
      "GapBetweenPACs",
      "ActionLatency",
      "ActionsInPAC",
      "TotalMapExplored",
      "WorkersMade",
      "UniqueUnitsMade",
      "ComplexUnitsMade",
      "ComplexAbilitiesUsed",
    ),
    target="LeagueIndex",
    digest="e1abeb1804f47949ca0495c5679e7dcca2e6f79189009361e8e45662513b561a",
    num_rows=3338,
    unused=("GameID",),
  ),
  "sml": UciTable(
    archive="274/sml2010.zip",
    files=(("NEW-DATA-1.T15.txt",), ("NEW-DATA-2.T15.txt",)),
    columns=(
      "1:Date",
      "2:Time",
      "3:Temperature_Comedor_Sensor",
      "4:Temperature_Habitacion_Sensor",
      "5:Weather_Temperature",
      "6:CO2_Comedor_Sensor",
      "7:CO2_Habitacion_Sensor",
      "8:Humedad_Comedor_Sensor",
      "9:Humedad_Habitacion_Sensor",
      "10:Lighting_Comedor_Sensor",
      "11:Lighting_Habitacion_Sensor",
      "12:Precipitacion",
      "13:Meteo_Exterior_Crepusculo",
      "14:Meteo_Exterior_Viento",
      "15:Meteo_Exterior_Sol_Oest",
      "16:Meteo_Exterior_Sol_Est",
      "17:Meteo_Exterior_Sol_Sud",
      "18:Meteo_Exterior_Piranometro",
      "19:Exterior_Entalpic_1",
      "20:Exterior_Entalpic_2",
      "21:Exterior_Entalpic_turbo",
      "22:Temperature_Exterior_Sensor",
      "23:Humedad_Exterior_Sensor",
      "24:Day_Of_Week",
    ),
    target="4:Temperature_Habitacion_Sensor",
    digest="e2cc44b2beff45676d0b9ad1c210e5eaa54aa4d1ccdeb8abbe8882025293bb67",
    num_rows=4137,
    # The two other thermometers nearly equal the target; 19 to 21 are constant.
    unused=(
      "3:Temperature_Comedor_Sensor",
      "19:Exterior_Entalpic_1",
      "20:Exterior_Entalpic_2",
      "21:Exterior_Entalpic_turbo",
      "22:Temperature_Exterior_Sensor",
    ),
    categorical=("1:Date", "2:Time"),
    delimiter=None,
    derive=clock,
  ),
  "parkinsons": UciTable(
    archive="189/parkinsons+telemonitoring.zip",
    files=(("parkinsons_updrs.data",),),
    columns=(
      "subject#",
      "age",
      "sex",
      "test_time",
      "motor_UPDRS",
      "total_UPDRS",
      "Jitter(%)",
      "Jitter(Abs)",
      "Jitter:RAP",
      "Jitter:PPQ5",
      "Jitter:DDP",
      "Shimmer",
      "Shimmer(dB)",
      "Shimmer:APQ3",
      "Shimmer:APQ5",
      "Shimmer:APQ11",
      "Shimmer:DDA",
      "NHR",
      "HNR",
      "RPDE",
      "DFA",
      "PPE",
    ),
    target="total_UPDRS",
    digest="2f3a31e19d0f553076224ea50f6f412e85768a6c9f23c267123daa04799963b1",
    num_rows=5875,
    unused=("motor_UPDRS",),
  ),
  "bike": UciTable(
    archive="560/seoul+bike+sharing+demand.zip",
    files=(("SeoulBikeData.csv",),),
    columns=(
      "Date",
      "Rented Bike Count",
      "Hour",
      "Temperature",
      "Humidity",
      "Wind speed (m/s)",
      "Visibility (10m)",
      "Dew point temperature(°C)",
      "Solar Radiation (MJ/m2)",
      "Rainfall(mm)",
      "Snowfall (cm)",
      "Seasons",
      "Holiday",
      "Functioning Day",
    ),
    target="Rented Bike Count",
    digest="2061d897e9c1b2bae709f82cf04c425c3c923aaa45fbf032e828c39bf4e94aa9",
    num_rows=8760,
    unused=("Date",),
    categorical=("Date", "Seasons", "Holiday", "Functioning Day"),
    standardised_error=True,
  ),
  "ccpp": UciTable(
    archive="294/combined+cycle+power+plant.zip",
    files=(("Folds5x2_pp.csv", "Folds5x2_pp.xlsx"),),
    columns=("AT", "V", "AP", "RH", "PE"),
    target="PE",
    digest="8984e9252c462fde024a762da7136125566bda8b5d0c4019e2fb6a5c84ff40ea",
    num_rows=9568,
    derive=in_order,
  ),
}
